"""Breaking stores on purpose: faults, kills, power cuts and wrong bytes."""
