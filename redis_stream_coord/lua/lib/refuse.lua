-- Answer with an error word from however deep. Nothing may have been written before: a refusal changes nothing.
-- Parameters: the error word, then the details that a person would want to read.
return function(word, ...)
  error({ refused = { word, ... } }, 0)
end
