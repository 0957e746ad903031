"""Explainers, and measures of the quality of their evidence."""

from carmil.evidence.agreement import NEGATIVE_RULES, Agreement, average_precision, evidence_agreement
from carmil.evidence.explainers import EXPLAINERS, default_explainer, explain, explainers_of, residual
from carmil.statistics.performance import bag_auc, bag_performance

__all__ = [
    "EXPLAINERS",
    "NEGATIVE_RULES",
    "Agreement",
    "average_precision",
    "bag_auc",
    "bag_performance",
    "default_explainer",
    "evidence_agreement",
    "explain",
    "explainers_of",
    "residual",
]
