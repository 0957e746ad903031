"""The run folder: the request of `carmil train` and its results. The only room that reads or writes it."""
