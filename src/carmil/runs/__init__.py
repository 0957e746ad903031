"""A run: what `carmil train` was asked, and what it found. The only room that reads or writes a run's folder."""
