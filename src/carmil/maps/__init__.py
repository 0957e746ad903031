"""Maps of tiles: their names, scales and colours; drawing them onto slides, GeoJSON, OME-TIFF; annotations and tile labels.

Reports and the viewer use this package; optional libraries (scikit-image, tifffile) are imported where a function needs them.
"""
