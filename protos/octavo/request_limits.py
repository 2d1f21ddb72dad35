"""What the protos bound of a request: the router says it well, the others make sure of it.

Must not know: any service. Entry points: the constants.
"""

# Sequences of a request (scheduler.proto's Submit.num_sequences): 1 .. 128.
MAX_SEQUENCES = 128
# Alternatives reported per token (common.proto's logprobs and prompt_logprobs): 0 .. 20.
MAX_ALTERNATIVES = 20
