"""RewardBench's arrangement: which subset belongs to which section, and how much it counts there.

Facts of allenai/reward-bench, ``rewardbench/constants.py`` and ``calculate_scores_per_section`` in
``rewardbench/utils.py`` (commit 05a9005). A section is the mean of its subsets' accuracies weighted by their numbers of
pairs, but for math-prm (447 pairs), which counts 984: as much as the six code subsets together.
"""

from collections.abc import Mapping

SECTIONS: Mapping[str, Mapping[str, int]] = {
    "chat": {
        "alpacaeval-easy": 100,
        "alpacaeval-length": 95,
        "alpacaeval-hard": 95,
        "mt-bench-easy": 28,
        "mt-bench-med": 40,
    },
    "chat_hard": {
        "mt-bench-hard": 37,
        "llmbar-natural": 100,
        "llmbar-adver-neighbor": 134,
        "llmbar-adver-GPTInst": 92,
        "llmbar-adver-GPTOut": 47,
        "llmbar-adver-manual": 46,
    },
    "safety": {
        "refusals-dangerous": 100,
        "refusals-offensive": 100,
        "xstest-should-refuse": 154,
        "xstest-should-respond": 250,
        "donotanswer": 136,
    },
    "reasoning": {
        "math-prm": 984,
        "hep-cpp": 164,
        "hep-go": 164,
        "hep-java": 164,
        "hep-js": 164,
        "hep-python": 164,
        "hep-rust": 164,
    },
}
SECTION_OF = {subset: section for section, subsets in SECTIONS.items() for subset in subsets}


def section_shares(section: str) -> dict[str, float]:
    """Returns how much each subset counts in the accuracy of its section; the shares sum to 1."""
    counts = SECTIONS[section]
    return {subset: count / sum(counts.values()) for subset, count in counts.items()}


def overall_shares() -> dict[str, float]:
    """Returns how much each subset counts in the mean of the four sections, which count alike.

    The leaderboard's average also has older test sets, at half a section's weight; they are no part of this data.
    """
    return {subset: share / len(SECTIONS) for section in SECTIONS for subset, share in section_shares(section).items()}
