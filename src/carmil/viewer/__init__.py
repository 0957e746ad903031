"""A run in the browser: its slides, the evidence for and against every class, and the answer without selected tissue.

Needs `pip install carmil[viewer]`. No other room of carmil imports this one.
"""
