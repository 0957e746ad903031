"""Models with the interface of scikit-learn and scikit-survival: a classifier, a regressor, the time to an event."""
