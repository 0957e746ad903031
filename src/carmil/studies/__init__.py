"""Studies on a user's own data: from features and a table of labels to publishable figures."""
