"""Predict the slides that calibrate the prediction sets of a run, with every one of its models."""

import pandas as pd
from torch import Tensor

from carmil.runs.calibration_slides import CalibrationSlides
from carmil.studies.cohort import Cohort
from carmil.studies.predictions import outcomes
from carmil.training.population import Population
from carmil.training.predict import predict


def calibrate(
    population: Population, cohort: Cohort, places: Tensor, level: float, *, weights: str
) -> CalibrationSlides:
    """Return the predictions of every model for the labelled bags at these positions. weights: the fingerprint of the
    models.
    """
    values = predict(population, cohort.bags, chosen=places, maps=False).values
    frame = cohort.add_labels(pd.DataFrame({"slide": [cohort.bags.ids[i] for i in places.tolist()]}))
    return CalibrationSlides(
        weights=weights,
        level=level,
        slides=tuple(frame["slide"]),
        patients=tuple(frame["patient"]),
        labels=tuple(outcomes(frame, cohort.target).tolist()),
        predicted=tuple(tuple(tuple(row) for row in model) for model in values.double().clamp(0, 1).tolist()),
    )
