"""Value types that several components share. Frozen, slotted, without I/O."""
