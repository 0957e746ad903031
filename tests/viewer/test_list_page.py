"""The list of slides on the page: sorted, filtered, searched, and stepped through with keys."""

import numpy as np

from carmil.words import probability_text

from .fake_server import BROKEN, CASES, answer, evidence, link, row
from .pages import assert_probabilities, expect, hash_of, shows, until


def test_page_opens_with_the_cohort(opened, made_up):
    page = opened(f"{made_up}/")
    expect(page.locator("#count")).to_have_text(f"{CASES:,}")
    assert page.locator("#grid").get_attribute("aria-rowcount") == str(CASES + 1)
    assert page.locator(".rows .row").count() < 60  # only visible rows exist
    assert page.get_by_text("RESEARCH USE ONLY").is_visible()
    assert page.title().endswith("(research use only)")


def test_cohort_can_be_sorted_filtered_and_searched(opened, made_up):
    page = opened(f"{made_up}/")
    first = page.locator(".rows .row").first
    page.get_by_role("button", name="probability").click()
    lowest = min(range(CASES), key=lambda i: (row(i)["value"], i))
    expect(first.locator(".slide")).to_have_text(row(lowest)["slide"])
    expect(page.locator("[role=columnheader].value")).to_have_attribute("aria-sort", "ascending")
    page.get_by_role("button", name="probability").click()
    expect(first.locator(".value")).to_have_text(probability_text(max(row(i)["value"] for i in range(CASES))))
    page.get_by_label("errors only").check()
    wrong = sum(row(i)["right"] is False for i in range(CASES))
    expect(page.locator("#count")).to_have_text(f"{wrong} of {CASES:,}")
    expect(page.locator(".rows .row:not(:has(.wrong))")).to_have_count(0)
    page.get_by_role("searchbox").fill("patient_007 node_2")
    expect(page.locator(".rows .slide")).to_have_text(["patient_007_node_2"])
    page.get_by_role("searchbox").fill("nobody")
    expect(page.get_by_text("No slide matches.")).to_be_visible()


def test_keys_step_through_the_cases(opened, made_up):
    page = opened(f"{made_up}/{link(0)}")
    for number in (1, 2, 3):
        page.keyboard.press("j")
        shows(page, number)
        assert_probabilities(page, answer(number, np.arange(len(evidence(number)))))
    page.keyboard.press("k")
    shows(page, 2)
    page.locator("#grid").focus()
    page.keyboard.press("End")
    expect(page.locator("#grid")).to_have_attribute("aria-activedescendant", f"case-{CASES - 1}")
    expect(page.locator(f"#case-{CASES - 1}")).to_be_visible()
    page.keyboard.press("Home")
    page.keyboard.press("ArrowDown")
    until(page, lambda: hash_of(page).startswith(link(1)))


def test_unreadable_case_shows_an_error_and_the_next_case_opens(opened, made_up):
    page = opened(f"{made_up}/{link(BROKEN)}", refused=True)
    expect(page.get_by_role("alert").first).to_contain_text("its features are not where the run says")
    page.keyboard.press("j")
    shows(page, BROKEN + 1)
    expect(page.locator(".chances")).to_be_visible()
