"""Shapes checked at run time: the one decorator that public functions carry."""

from beartype import beartype
from jaxtyping import jaxtyped

# Wrong shapes or dtypes raise ``jaxtyping.TypeCheckError``, whose message names the argument,
# the expected shape and what came.
typed = jaxtyped(typechecker=beartype)
