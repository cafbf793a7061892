"""From what the user asked for to what SGLang is started with: defaults, refusals, checks."""
