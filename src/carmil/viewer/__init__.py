"""A run in the browser: its slides, the evidence for and against every class, and what happens when tissue is taken away.

Needs `pip install carmil[viewer]`. Nothing else in carmil imports this room.
"""
