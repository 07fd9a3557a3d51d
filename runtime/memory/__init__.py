"""Who may have how many bytes: the plan before loading, the limits of the machine, admission, and what is moved out."""
