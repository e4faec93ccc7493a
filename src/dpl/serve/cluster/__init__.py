"""One server divided over several processes or machines: parts that own streams, and a front that finds the owner."""
