"""`kvrelay plan`: its options, its inputs, and its views."""
