"""Chain speculation: drafting, verification, and which KV slots the draft has really seen."""
