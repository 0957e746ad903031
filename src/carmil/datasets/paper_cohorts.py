"""The five cohorts of slides in the paper: the question, the number of slides, the source and its terms.

Classes are in the order of the paper, with its number of slides; for CAMELYON16 also for train and test.
"""

import re
from dataclasses import dataclass

from carmil.errors import CarmilError, unknown

TCGA_TERMS = "open access at the Genomic Data Commons; its data use policy applies"
GDC = "https://portal.gdc.cancer.gov"


@dataclass(frozen=True)
class Class:
    """One class: its name in labels.csv, the number of slides in the paper, and synonyms in lower case."""

    name: str
    slides: int
    words: tuple[str, ...] = ()


@dataclass(frozen=True)
class Dataset:
    """A cohort of the paper. measures, official, seeds, lr: its protocol. tables: the input of `carmil dataset labels`."""

    name: str
    title: str
    question: str
    classes: tuple[Class, ...]
    source: str
    terms: str
    tables: str
    measures: tuple[str, str] = ("auc", "f1_macro")
    official: bool = False
    seeds: int = 1
    lr: float = 2e-4
    parts: tuple[tuple[str, tuple[int, ...]], ...] = ()
    patch_labels: bool = False

    @property
    def slides(self) -> int:
        return sum(one.slides for one in self.classes)

    def class_of(self, word: str) -> Class | None:
        """Return the class named by a word, or by a path such as those of BRACS, which contain Type_ADH."""
        word = word.strip().casefold()
        for one in self.classes:
            if word in (one.name.casefold(), *one.words):
                return one
        inside = re.search(r"(?:^|[/\\])(type_[a-z]+)(?:[/\\]|$)", word)
        return self.class_of(inside[1]) if inside and inside[1] != word else None

    @property
    def counted(self) -> str:
        """Return the paper's counts as text."""
        whole = ", ".join(f"{one.name} {one.slides}" for one in self.classes)
        parts = "; ".join(f"{part} {sum(counts)}" for part, counts in self.parts)
        return f"{self.slides} slides: {whole}" + (f" ({parts})" if parts else "")


DATASETS = (
    Dataset(
        "brca",
        "TCGA-BRCA",
        "ductal or lobular",
        (
            Class("IDC", 779, ("infiltrating ductal carcinoma", "breast invasive ductal carcinoma", "ductal")),
            Class("ILC", 198, ("infiltrating lobular carcinoma", "breast invasive lobular carcinoma", "lobular")),
        ),
        GDC,
        TCGA_TERMS,
        "a table of case (or slide) barcodes and IDC or ILC, such as RRT-MIL's, or a clinical table",
    ),
    Dataset(
        "nsclc",
        "TCGA-NSCLC",
        "adenocarcinoma or squamous cell carcinoma",
        (
            Class("LUAD", 478, ("tcga-luad", "lung adenocarcinoma", "adenocarcinoma")),
            Class("LUSC", 478, ("tcga-lusc", "lung squamous cell carcinoma", "squamous cell carcinoma")),
        ),
        GDC,
        TCGA_TERMS,
        "a table of barcodes and LUAD or LUSC; or a table of each, as LUAD=FILE and LUSC=FILE",
    ),
    Dataset(
        "luad_tp53",
        "TCGA-LUAD TP53",
        "is TP53 mutated",
        (
            Class("0 wild type", 199, ("wt", "wild type", "wild-type", "wildtype", "0", "no", "false")),
            Class("1 mutated", 228, ("mut", "mutated", "mutant", "mutation", "1", "yes", "true")),
        ),
        f"{GDC}; mutations also from https://www.cbioportal.org",
        TCGA_TERMS,
        "a mutation table (MAF; cBioPortal's with a column TP53), or barcodes with wt and mut",
    ),
    Dataset(
        "bracs",
        "BRACS",
        "seven kinds of breast lesion",
        (
            Class("0 N", 44, ("n", "normal", "type_n")),
            Class("1 PB", 147, ("pb", "pathological benign", "type_pb")),
            Class("2 UDH", 73, ("udh", "usual ductal hyperplasia", "type_udh")),
            Class("3 ADH", 48, ("adh", "atypical ductal hyperplasia", "type_adh")),
            Class("4 FEA", 41, ("fea", "flat epithelial atypia", "type_fea")),
            Class("5 DCIS", 61, ("dcis", "ductal carcinoma in situ", "type_dcis")),
            Class("6 IC", 132, ("ic", "invasive carcinoma", "type_ic")),
        ),
        "https://www.bracs.icar.cnr.it",
        "for research, after registration; its page has the terms",
        "ACMIL's table, or BRACS.xlsx saved as CSV: slide, type of lesion, train, val or test",
        measures=("balanced_accuracy", "f1_macro"),
        official=True,
        seeds=3,
        lr=1e-4,
    ),
    Dataset(
        "camelyon16",
        "CAMELYON16",
        "is there a metastasis in the lymph node",
        (Class("normal", 239, ("0", "negative")), Class("tumor", 160, ("1", "tumour", "positive"))),
        "https://camelyon17.grand-challenge.org/Data",
        "open (CC0); its page has the terms",
        "ACMIL's table, or the challenge's reference.csv for test_001 and on with a list of the training slides",
        measures=("auc", "auprc_attention"),
        official=True,
        seeds=3,
        parts=(("train", (159, 111)), ("test", (80, 49))),
        patch_labels=True,
    ),
)


def dataset_named(name: str) -> Dataset:
    for dataset in DATASETS:
        if dataset.name == name:
            return dataset
    raise CarmilError(unknown("dataset", name, [dataset.name for dataset in DATASETS]))
