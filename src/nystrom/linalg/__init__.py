"""Linear algebra, without attention: inverses, low-rank approximations, spectra, and random draws of columns."""

from nystrom.linalg.low_rank import complete, nystrom_columns_and_rows, nystrom_off_diagonal, nystrom_psd
from nystrom.linalg.pinv import pinv, pinv_exact, pinv_iterative, pinv_ridge, residual
from nystrom.linalg.sampling import (
    Draws,
    approximate_leverage_scores,
    leverage_draws,
    recursive_leverage_draws,
    uniform_draws,
)
from nystrom.linalg.spectrum import (
    condition_number,
    effective_rank,
    leverage_scores,
    loewner_gap,
    spectral_norm,
    stable_rank,
    statistical_dimension,
)

__all__ = [
    "Draws",
    "approximate_leverage_scores",
    "complete",
    "condition_number",
    "effective_rank",
    "leverage_draws",
    "leverage_scores",
    "loewner_gap",
    "nystrom_columns_and_rows",
    "nystrom_off_diagonal",
    "nystrom_psd",
    "pinv",
    "pinv_exact",
    "pinv_iterative",
    "pinv_ridge",
    "recursive_leverage_draws",
    "residual",
    "spectral_norm",
    "stable_rank",
    "statistical_dimension",
    "uniform_draws",
]
