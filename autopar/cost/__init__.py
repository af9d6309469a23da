"""Prices, in seconds and bytes, by formula; nothing here measures."""

from autopar.cost.collective import collective_seconds as collective_seconds
from autopar.cost.prices import Prices as Prices
from autopar.cost.prices import compute_seconds as compute_seconds
from autopar.cost.prices import elementwise_seconds as elementwise_seconds
