"""How fast this machine trains, beside the loop that the field uses and beside what the machine could do at best."""
