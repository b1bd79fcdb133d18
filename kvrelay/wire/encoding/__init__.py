"""Protobuf's encoding: numbers, fields and their bounds."""
