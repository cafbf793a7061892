"""The portable CPU platform: real SGLang serving on any x86 or ARM machine, without a GPU."""
