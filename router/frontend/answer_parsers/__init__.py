"""Parsers that turn the streamed text of a chat answer into content, reasoning and tool calls."""
