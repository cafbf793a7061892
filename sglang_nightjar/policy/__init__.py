"""Pure decisions: which gamma, and (later) whether the draft stays resident. No torch, no SGLang."""
