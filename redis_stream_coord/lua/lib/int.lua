-- Write a whole number. On Redis 7 `tostring` of a microsecond time gives '1.79e+15'.
return function(number)
  return string.format('%.0f', number)
end
