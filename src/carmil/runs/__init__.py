"""The run folder: the settings of `carmil train` and its results. No other room reads or writes its files."""
