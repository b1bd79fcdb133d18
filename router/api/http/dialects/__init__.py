"""The dialects: APIs of other vendors in which a client may ask for an answer."""
