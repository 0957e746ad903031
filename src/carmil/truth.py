"""Values of the truth about an instance: 1 is evidence for the class, -1 against it, 0 neither."""

UNKNOWN = -128  # not annotated
