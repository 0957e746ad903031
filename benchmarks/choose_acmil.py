"""How many maps ACMIL has in `carmil reproduce crc`: chosen by the validation loss of its folds, nothing else.

    python benchmarks/choose_acmil.py --data DIR [--heads 5,3,2,1] [--masked 0.0,0.6] [--seeds 3] [--device cuda]

One population a choice: five folds and `seeds` initialisations, the recipe of `carmil reproduce crc`. The test figures are printed
beside for the record; they are not what is chosen by.
"""

import argparse
from pathlib import Path

import torch

from carmil.counterfactual import create_model
from carmil.evidence import bag_auc
from carmil.provenance import machine_line
from carmil.reproduce.crc import FOLDS, LEARNING_RATE, RECIPE, fold_roles, load_crc
from carmil.studies.agreement import map_auprc
from carmil.training.loop import fit
from carmil.training.population import Member, Population
from carmil.training.predict import predict

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--heads", default="5,3,2,1")
    parser.add_argument("--masked", default="0.0")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--model", default="acmil")
    parser.add_argument("--device", default="cuda")
    given = parser.parse_args()
    print(machine_line())
    bags = load_crc(given.data)
    roles, tested = fold_roles(bags.labels, 0)
    members = [
        Member(seed=fold + FOLDS * seed, lr=LEARNING_RATE) for seed in range(given.seeds) for fold in range(FOLDS)
    ]
    for heads in map(int, given.heads.split(",")):
        for masked in map(float, given.masked.split(",")):
            options = {"heads": heads, "masked_share": masked}

            def build(options=options):
                return create_model(given.model, bags.width, 2, **options)

            population = Population(build, members, device=given.device)
            history = fit(population, bags, roles.repeat(given.seeds, 1), RECIPE)
            best = history.validation.nan_to_num(torch.inf).amin(0)
            answers = predict(population, bags).probabilities
            figures = {"AUC": [], "attention": [], "path": []}
            for row in range(len(members)):
                test = tested[row % FOLDS]
                figures["AUC"].append(bag_auc(answers[row][test], bags.labels[test]))
                for method in ("attention", "path"):
                    figures[method].append(map_auprc(population.member(row), bags, test, method))
            shown = ", ".join(f"{name} {100 * torch.tensor(values).mean():.1f}" for name, values in figures.items())
            print(f"{heads} maps, masked {masked:g}: validation loss {best.mean():.4f}; test {shown}", flush=True)
