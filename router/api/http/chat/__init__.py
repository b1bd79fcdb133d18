"""Chats over HTTP: messages, tools, and the parts of an answer."""
