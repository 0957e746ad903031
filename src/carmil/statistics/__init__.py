"""Metrics, intervals, tests, calibration and operating points: numbers in, numbers out."""
