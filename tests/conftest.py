"""What all tests share."""

from hypothesis import settings

# A busy machine may take seconds for an example: time says nothing of what is tested.
settings.register_profile("nightjar", deadline=None)
settings.load_profile("nightjar")
