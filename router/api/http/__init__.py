"""The HTTP endpoints: OpenAI's API, health, metrics and dashboard."""
