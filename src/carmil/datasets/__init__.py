"""Cohorts to train on: digit bags, the nuclei of crc, the stand-in slides, the paper's cohorts of slides."""
