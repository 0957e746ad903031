"""Figures of answers and how sure they are: metrics, intervals, tests, calibration, operating points. Numbers in, numbers out."""
