"""Tensor parallelism: one worker whose model is shared by several processes, its ranks.

`shares` says what of a model a rank holds, `sharded` cuts layers and vocabulary, `ranks` joins
the processes for collectives, `links` and `followers` carry plans from rank 0 to the others,
`launch` starts these and watches them, `leading` and `following` are the two sides' loops.
Read `leading` first. A worker of one rank imports none of it.
"""
