"""Material to train on: digit bags, crc's nuclei, the stand-in slides, the paper's cohorts of slides."""
