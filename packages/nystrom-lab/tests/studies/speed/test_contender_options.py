"""Names of contenders mean the options that names of methods mean."""

from nystrom.attention.method_names import SIZES, read_method
from nystrom_lab.studies.speed.contenders.table import CONTENDERS, Ours


def test_the_speed_study_sets_the_same_options():
    for name, contender in CONTENDERS.items():
        if isinstance(contender.build, Ours) and contender.number is not None:
            method = contender.build.method
            assert contender.number == SIZES[method][1], name
            assert read_method(f"{method}-33")[1].items() <= contender.build.options(33, 1024).items(), name
