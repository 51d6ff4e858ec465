"""Pure arithmetic of time and money: prices, the limit that a budget buys, the meter, the cost so far."""
