"""What the truth about an instance can be, as a number: 1 speaks for the class, 0 for nothing, -1 against it."""

UNKNOWN = -128  # nobody knows
