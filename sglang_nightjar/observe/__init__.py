"""What a running server tells about itself: the journal and the log."""
