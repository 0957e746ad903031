"""A user's own study: from a folder of features and a table of labels to figures one can publish."""
