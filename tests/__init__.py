"""The checker behind `--jaxtyping-packages`: beartype, for which an int is a float too, as the type system has it."""

from beartype import BeartypeConf, beartype

checked = beartype(conf=BeartypeConf(is_pep484_tower=True))
