"""The HTTP endpoints: OpenAI's API, health, metrics and the dashboard."""
