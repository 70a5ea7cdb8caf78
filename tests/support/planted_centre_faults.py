"""Faults to plant where 4-bit keys are held relative to the centre of their page."""

from tests.support.planted_faults import BOTH, Fault

FORMATS = ("fp16", "q4")
CENTRE_FAULTS = [
    Fault(
        "scores lack the product with the centre of a page",
        "decode",
        "if (keys.centre) multiply_centre(keys.centre, lane, queries, sums);",
        "",
        dialects=BOTH,
        lengths=(600,),
        formats=FORMATS,
    ),
    Fault(
        "the keys of a long step lack their centre",
        "prefill",
        "if (slots.centre) {",
        "if (false) {",
        dialects=BOTH,
        queries=9,
        lengths=(600,),
        formats=FORMATS,
    ),
    Fault(
        "no barrier before the parts of a centre are joined",
        "copy",
        "* LANES + place.lane] = centre[i];\n  threads_meet();\n",
        "* LANES + place.lane] = centre[i];\n",
        "race",
        BOTH,
        lengths=(256,),
        formats=FORMATS,
    ),
    Fault(
        "all threadgroups write a page's centre",
        "copy",
        "if (place.x + place.simdgroup == 0 && i",
        "if (place.simdgroup == 0 && i",
        "race",
        BOTH,
        lengths=(256,),
        formats=FORMATS,
    ),
    Fault(
        "nobody writes a page's centre",
        "copy",
        "if (place.x + place.simdgroup == 0 && i",
        "if (place.x + place.simdgroup == 99 && i",
        dialects=BOTH,
        lengths=(256,),
        formats=FORMATS,
    ),
]
