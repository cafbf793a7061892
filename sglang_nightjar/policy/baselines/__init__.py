"""The policies Nightjar is measured against, one per module, behind the same `Policy` interface."""
