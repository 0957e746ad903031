"""Maps of instances: their names, colours and files; drawing them onto slides, GeoJSON, annotations.

Reports and the viewer use this room; what is optional to install (scikit-image, tifffile) is imported when a function needs it.
"""
