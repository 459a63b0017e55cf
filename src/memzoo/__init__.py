"""memzoo: test-time-memory language models for Hugging Face Transformers.

Importing it registers every architecture with transformers' Auto classes.
"""

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification

from memzoo.configuration.titans import TitansConfig
from memzoo.modeling.cache import MemoryCache, load_memory, save_memory
from memzoo.modeling.titans import TitansForCausalLM, TitansForSequenceClassification, TitansModel

__version__ = "0.1.0"

# One line per architecture: config, backbone, language model, classifier.
ARCHITECTURES = ((TitansConfig, TitansModel, TitansForCausalLM, TitansForSequenceClassification),)

for _config, _model, _causal_lm, _classifier in ARCHITECTURES:
    AutoConfig.register(_config.model_type, _config, exist_ok=True)
    AutoModel.register(_config, _model, exist_ok=True)
    AutoModelForCausalLM.register(_config, _causal_lm, exist_ok=True)
    AutoModelForSequenceClassification.register(_config, _classifier, exist_ok=True)

__all__ = [
    "ARCHITECTURES",
    "MemoryCache",
    "TitansConfig",
    "TitansForCausalLM",
    "TitansForSequenceClassification",
    "TitansModel",
    "load_memory",
    "save_memory",
]
