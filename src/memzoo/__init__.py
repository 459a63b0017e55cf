"""memzoo: test-time-memory language models for Hugging Face Transformers.

Importing it registers every architecture with transformers' Auto classes.
"""

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from memzoo.configuration.atlas import AtlasConfig, DLAConfig, OmegaNetConfig
from memzoo.configuration.exponential_memory import DeepTransformerConfig, DotConfig, SWDTConfig
from memzoo.configuration.hope import HopeAttentionConfig, HopeConfig
from memzoo.configuration.matrix_memory import (
    CombaConfig,
    DeltaNetConfig,
    GatedDeltaNetConfig,
    RetNetConfig,
    SWLAConfig,
    TransformerPlusPlusConfig,
)
from memzoo.configuration.memory_managed import MemoryManagedConfig
from memzoo.configuration.titans import TitansConfig
from memzoo.modeling.atlas import AtlasForCausalLM, AtlasForSequenceClassification, AtlasModel
from memzoo.modeling.cache import MemoryCache, load_memory, save_memory
from memzoo.modeling.comba import CombaForCausalLM, CombaForSequenceClassification, CombaModel
from memzoo.modeling.deep_transformer import (
    DeepTransformerForCausalLM,
    DeepTransformerForSequenceClassification,
    DeepTransformerModel,
)
from memzoo.modeling.deltanet import DeltaNetForCausalLM, DeltaNetForSequenceClassification, DeltaNetModel
from memzoo.modeling.dla import DLAForCausalLM, DLAForSequenceClassification, DLAModel
from memzoo.modeling.dot import DotForCausalLM, DotForSequenceClassification, DotModel
from memzoo.modeling.gated_deltanet import (
    GatedDeltaNetForCausalLM,
    GatedDeltaNetForSequenceClassification,
    GatedDeltaNetModel,
)
from memzoo.modeling.hope import HopeForCausalLM, HopeForSequenceClassification, HopeModel
from memzoo.modeling.hope_attention import (
    HopeAttentionForCausalLM,
    HopeAttentionForSequenceClassification,
    HopeAttentionModel,
)
from memzoo.modeling.managed_adapter import MemoryManagedAdapter
from memzoo.modeling.memory_managed import (
    MemoryManagedForCausalLM,
    MemoryManagedForSequenceClassification,
    MemoryManagedModel,
)
from memzoo.modeling.omeganet import OmegaNetForCausalLM, OmegaNetForSequenceClassification, OmegaNetModel
from memzoo.modeling.optimizers.dgd import DGD
from memzoo.modeling.optimizers.m3 import M3, matrix_groups
from memzoo.modeling.optimizers.proteus_adamw import ProteusAdamW, ProteusCallback, parameter_groups
from memzoo.modeling.retnet import RetNetForCausalLM, RetNetForSequenceClassification, RetNetModel
from memzoo.modeling.swdt import SWDTForCausalLM, SWDTForSequenceClassification, SWDTModel
from memzoo.modeling.swla import SWLAForCausalLM, SWLAForSequenceClassification, SWLAModel
from memzoo.modeling.titans import TitansForCausalLM, TitansForSequenceClassification, TitansModel
from memzoo.modeling.transformer_pp import (
    TransformerPlusPlusForCausalLM,
    TransformerPlusPlusForSequenceClassification,
    TransformerPlusPlusModel,
)

__version__ = "0.1.0"

# One line per architecture: config, backbone, language model, classifier.
ARCHITECTURES = (
    (TitansConfig, TitansModel, TitansForCausalLM, TitansForSequenceClassification),
    (OmegaNetConfig, OmegaNetModel, OmegaNetForCausalLM, OmegaNetForSequenceClassification),
    (AtlasConfig, AtlasModel, AtlasForCausalLM, AtlasForSequenceClassification),
    (DLAConfig, DLAModel, DLAForCausalLM, DLAForSequenceClassification),
    (
        DeepTransformerConfig,
        DeepTransformerModel,
        DeepTransformerForCausalLM,
        DeepTransformerForSequenceClassification,
    ),
    (SWDTConfig, SWDTModel, SWDTForCausalLM, SWDTForSequenceClassification),
    (DotConfig, DotModel, DotForCausalLM, DotForSequenceClassification),
    (RetNetConfig, RetNetModel, RetNetForCausalLM, RetNetForSequenceClassification),
    (DeltaNetConfig, DeltaNetModel, DeltaNetForCausalLM, DeltaNetForSequenceClassification),
    (GatedDeltaNetConfig, GatedDeltaNetModel, GatedDeltaNetForCausalLM, GatedDeltaNetForSequenceClassification),
    (CombaConfig, CombaModel, CombaForCausalLM, CombaForSequenceClassification),
    (SWLAConfig, SWLAModel, SWLAForCausalLM, SWLAForSequenceClassification),
    (
        TransformerPlusPlusConfig,
        TransformerPlusPlusModel,
        TransformerPlusPlusForCausalLM,
        TransformerPlusPlusForSequenceClassification,
    ),
    (
        HopeAttentionConfig,
        HopeAttentionModel,
        HopeAttentionForCausalLM,
        HopeAttentionForSequenceClassification,
    ),
    (HopeConfig, HopeModel, HopeForCausalLM, HopeForSequenceClassification),
    (
        MemoryManagedConfig,
        MemoryManagedModel,
        MemoryManagedForCausalLM,
        MemoryManagedForSequenceClassification,
    ),
)

for _config, _model, _causal_lm, _classifier in ARCHITECTURES:
    AutoConfig.register(_config.model_type, _config, exist_ok=True)
    AutoModel.register(_config, _model, exist_ok=True)
    AutoModelForCausalLM.register(_config, _causal_lm, exist_ok=True)
    AutoModelForSequenceClassification.register(_config, _classifier, exist_ok=True)
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[_config.model_type] = _causal_lm.__name__  # where Trainer looks whether to shift

__all__ = [
    "ARCHITECTURES",
    "DGD",
    "M3",
    "AtlasConfig",
    "AtlasForCausalLM",
    "AtlasForSequenceClassification",
    "AtlasModel",
    "CombaConfig",
    "CombaForCausalLM",
    "CombaForSequenceClassification",
    "CombaModel",
    "DLAConfig",
    "DLAForCausalLM",
    "DLAForSequenceClassification",
    "DLAModel",
    "DeepTransformerConfig",
    "DeepTransformerForCausalLM",
    "DeepTransformerForSequenceClassification",
    "DeepTransformerModel",
    "DeltaNetConfig",
    "DeltaNetForCausalLM",
    "DeltaNetForSequenceClassification",
    "DeltaNetModel",
    "DotConfig",
    "DotForCausalLM",
    "DotForSequenceClassification",
    "DotModel",
    "GatedDeltaNetConfig",
    "GatedDeltaNetForCausalLM",
    "GatedDeltaNetForSequenceClassification",
    "GatedDeltaNetModel",
    "HopeAttentionConfig",
    "HopeAttentionForCausalLM",
    "HopeAttentionForSequenceClassification",
    "HopeAttentionModel",
    "HopeConfig",
    "HopeForCausalLM",
    "HopeForSequenceClassification",
    "HopeModel",
    "MemoryCache",
    "MemoryManagedAdapter",
    "MemoryManagedConfig",
    "MemoryManagedForCausalLM",
    "MemoryManagedForSequenceClassification",
    "MemoryManagedModel",
    "OmegaNetConfig",
    "OmegaNetForCausalLM",
    "OmegaNetForSequenceClassification",
    "OmegaNetModel",
    "ProteusAdamW",
    "ProteusCallback",
    "RetNetConfig",
    "RetNetForCausalLM",
    "RetNetForSequenceClassification",
    "RetNetModel",
    "SWDTConfig",
    "SWDTForCausalLM",
    "SWDTForSequenceClassification",
    "SWDTModel",
    "SWLAConfig",
    "SWLAForCausalLM",
    "SWLAForSequenceClassification",
    "SWLAModel",
    "TitansConfig",
    "TitansForCausalLM",
    "TitansForSequenceClassification",
    "TitansModel",
    "TransformerPlusPlusConfig",
    "TransformerPlusPlusForCausalLM",
    "TransformerPlusPlusForSequenceClassification",
    "TransformerPlusPlusModel",
    "load_memory",
    "matrix_groups",
    "parameter_groups",
    "save_memory",
]
