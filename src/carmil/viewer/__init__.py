"""A run in the browser: its slides, the evidence for and against every class, and the answer without some of the tissue.

Needs `pip install carmil[viewer]`. Nothing else in carmil imports this room.
"""
