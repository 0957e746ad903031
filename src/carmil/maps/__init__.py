"""Maps of instances: what they are called, their colours, where they lie in a picture, and the files they are read from.

Slides, reports and the viewer draw with this room; it needs nothing that is optional to install.
"""
