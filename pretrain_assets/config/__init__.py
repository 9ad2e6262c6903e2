"""Configuration of every stage: frozen, keyword-only dataclasses that check themselves when they are made.

Invariant: a config is complete. Whatever changes a result is a field here, and nothing here is a secret, a clock, a
host name or a rank.
"""

from pretrain_assets.config.curation import (
    ContaminationConfig,
    EmbedConfig,
    MaskConfig,
    ModelScoreConfig,
    NearDedupConfig,
    QualityConfig,
)
from pretrain_assets.config.data import DataConfig, LoaderConfig, MixtureComponent, TokenizerIdentity
from pretrain_assets.config.stages import (
    DedupConfig,
    DocumentLossConfig,
    EngineConfig,
    IndexConfig,
    IngestConfig,
    MaintainConfig,
    TokenizeConfig,
)
from pretrain_assets.config.training import (
    ExecutionConfig,
    ModelConfig,
    Recipe,
    ReplayOf,
    RunSpec,
    TrainConfig,
    lasting,
)
from pretrain_assets.convert import check_name, from_dict, override, to_dict

__all__ = [
    "ContaminationConfig",
    "DataConfig",
    "DedupConfig",
    "DocumentLossConfig",
    "EmbedConfig",
    "EngineConfig",
    "ExecutionConfig",
    "IndexConfig",
    "IngestConfig",
    "LoaderConfig",
    "MaintainConfig",
    "MaskConfig",
    "MixtureComponent",
    "ModelConfig",
    "ModelScoreConfig",
    "NearDedupConfig",
    "QualityConfig",
    "Recipe",
    "ReplayOf",
    "RunSpec",
    "TokenizeConfig",
    "TokenizerIdentity",
    "TrainConfig",
    "check_name",
    "from_dict",
    "lasting",
    "override",
    "to_dict",
]
